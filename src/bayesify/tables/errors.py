"""What goes wrong with data or a folder that the user can mend."""

from __future__ import annotations


class InputError(ValueError):
    """Data, options or a folder that cannot be worked with; the message names the thing and the remedy."""
