"""EngramHash."""
