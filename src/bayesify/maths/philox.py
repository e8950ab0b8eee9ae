r"""Counter-based stream of normal numbers on a GPU. Each number of the stream can be computed alone, in any kernel, as often as
needed.

Numbers 4 j to 4 j + 3 of tile t come from Philox4x32 (Salmon et al. 2011) with the seed as key and the counter (j, t, 0, 0).
Philox's four words a, b, c, d give $r(a) \cos(b), r(a) \sin(b), r(c) \cos(d), r(c) \sin(d)$ (Box & Muller 1958), where
$r(a) = \sqrt{-2 \log (a + 1/2) 2^{-32}}$, and an angle is the word as a signed integer times $2 \pi / 2^{32}$.
"""

TILE = 2048
"""How many numbers one program of a kernel generates."""

ROUNDS = 10
"""Number of rounds of the generator, as in torch, numpy and Random123."""
