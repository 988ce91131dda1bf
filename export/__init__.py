"""From a checkpoint to ONNX stages, and the comparisons that show they compute the model."""
