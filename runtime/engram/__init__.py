"""The Engram tables: where they live, how their rows reach a step."""
