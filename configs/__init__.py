"""Facts about the model, choices of the operator, and the typed descriptions every other layer shares."""
