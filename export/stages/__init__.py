"""The stages of the chain: interface table first, then the module that is traced."""
