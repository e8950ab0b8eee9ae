"""Pure tensor functions that do not depend on networks."""
