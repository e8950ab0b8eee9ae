"""Code that all posteriors share: the base class, fused draws, initial scales, and several posteriors in one network."""
