"""Pure tensor functions that know nothing of networks."""
