"""What a model needs and costs, worked out from its shapes before a byte is written; no torch in here."""
