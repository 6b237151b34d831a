"""The head's side: the server that boxes call, the reports that it stores, and the files that it sends."""

from windlass.service.cluster.head.content import content_router as content_router
from windlass.service.cluster.head.incoming import Incoming as Incoming
from windlass.service.cluster.head.manifest import Manifests as Manifests
from windlass.service.cluster.head.sync import sync_router as sync_router
