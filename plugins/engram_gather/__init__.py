"""EngramGather."""
