"""HyperConnectionMix."""
