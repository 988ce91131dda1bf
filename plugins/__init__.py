"""The custom operations, one folder each: contract, reference, torch op, ONNX form, kernel, TensorRT plugin."""
