"""SparseAttention."""
