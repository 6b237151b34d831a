"""Stores activations between the forward and the backward pass: on the host, and on the SSDs."""

from windlass.actors.activations.parts import At as At
from windlass.actors.activations.parts import BufferQueue as BufferQueue
from windlass.actors.activations.parts import Moment as Moment
from windlass.actors.activations.parts import Part as Part
from windlass.actors.activations.parts import SsdSwap as SsdSwap
from windlass.actors.activations.parts import cut as cut
from windlass.actors.activations.parts import slots_of_part as slots_of_part
from windlass.actors.activations.scratch_slots import ScratchSlots as ScratchSlots
from windlass.actors.activations.tiered_store import ActivationTiers as ActivationTiers
