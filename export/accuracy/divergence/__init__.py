"""Where two back ends first compute something else: `engram-trt compare ARTIFACT`."""
