"""MoEExpertOutputs."""
