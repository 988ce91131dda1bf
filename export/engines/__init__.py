"""From exported stages to TensorRT plans: `build.py` first."""
