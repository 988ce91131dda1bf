"""Back ends that run one stage on bound buffers."""
