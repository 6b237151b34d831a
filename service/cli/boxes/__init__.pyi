"""Commands for the boxes of a service, and units with which systemd starts them."""

from windlass.service.cli.boxes import nodes as nodes
from windlass.service.cli.boxes.network import check_network as check_network
from windlass.service.cli.boxes.units import unit_of as unit_of
