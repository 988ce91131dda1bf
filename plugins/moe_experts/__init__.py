"""MoEExperts."""
