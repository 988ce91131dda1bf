"""QuantizeDequantize."""
