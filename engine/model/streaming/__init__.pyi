"""Brings the params of a block to the device in pieces, each only while it is used."""

from windlass.engine.model.streaming.flats import StreamedFlats as StreamedFlats
from windlass.engine.model.streaming.layer import StreamedLayer as StreamedLayer
from windlass.engine.model.streaming.params import PieceBuffers as PieceBuffers
from windlass.engine.model.streaming.params import StreamedParams as StreamedParams
