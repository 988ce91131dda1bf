"""The model in torch: pure functions of explicit state, traced into stages and run as the reference."""
