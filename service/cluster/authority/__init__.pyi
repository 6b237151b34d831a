"""The right to call as a box: the certificate authority of a head, join codes, and certificates."""

from windlass.service.cluster.authority.codes import new_join_code as new_join_code
