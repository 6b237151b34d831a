"""The right to call as a box: the certificate authority of a head, join codes, and certificates."""

from windlass.service.cluster.authority.authority import HEAD_SERVER_NAME as HEAD_SERVER_NAME
from windlass.service.cluster.authority.authority import Authority as Authority
from windlass.service.cluster.authority.authority import AuthorityError as AuthorityError
from windlass.service.cluster.authority.authority import check_cluster_host as check_cluster_host
from windlass.service.cluster.authority.authority import digest_of_certificate as digest_of_certificate
from windlass.service.cluster.authority.authority import fingerprint_of as fingerprint_of
from windlass.service.cluster.authority.authority import make_box_request as make_box_request
from windlass.service.cluster.authority.codes import JoinCode as JoinCode
from windlass.service.cluster.authority.codes import join_commands as join_commands
from windlass.service.cluster.authority.codes import new_join_code as new_join_code
from windlass.service.cluster.authority.link_certificate import LinkCertificate as LinkCertificate
from windlass.service.cluster.authority.link_certificate import ensure_link_of_head as ensure_link_of_head
from windlass.service.cluster.authority.wheel import digest_of_wheel as digest_of_wheel
from windlass.service.cluster.authority.wheel import ensure_wheel as ensure_wheel
