"""The head's side: the server that boxes call, the reports that it stores, and the files that it sends."""

from windlass.service.cluster.head.caller import CERTIFICATE_KEY as CERTIFICATE_KEY
from windlass.service.cluster.head.caller import BoxDep as BoxDep
from windlass.service.cluster.head.caller import calling_box as calling_box
from windlass.service.cluster.head.known_boxes import hardware_of_boxes as hardware_of_boxes
from windlass.service.cluster.head.known_boxes import slowest_rate as slowest_rate
from windlass.service.cluster.head.network import NetworkCheck as NetworkCheck
from windlass.service.cluster.head.network import NetworkEnd as NetworkEnd
from windlass.service.cluster.head.network import PairRates as PairRates
from windlass.service.cluster.head.network import ProbeError as ProbeError
from windlass.service.cluster.head.network import pairs_of as pairs_of
from windlass.service.cluster.head.process import run_cluster_server as run_cluster_server
from windlass.service.cluster.head.server import create_cluster_app as create_cluster_app
