"""Transformations of a traced graph; each states what it needs and what it leaves behind."""
