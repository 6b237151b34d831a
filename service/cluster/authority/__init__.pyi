"""The right to call as a box: the certificate authority of a head, join codes, and certificates."""
