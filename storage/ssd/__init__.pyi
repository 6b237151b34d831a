"""An SSD as a file or a raw device, its calibration, and its division into extents."""

from windlass.storage.ssd.calibration import Calibration as Calibration
from windlass.storage.ssd.calibration import calibrate as calibrate
from windlass.storage.ssd.calibration import mixed_bytes_per_s as mixed_bytes_per_s
from windlass.storage.ssd.calibration import stripe_weights as stripe_weights
from windlass.storage.ssd.raw_device import device_nbytes as device_nbytes
from windlass.storage.ssd.raw_device import is_block_device as is_block_device
from windlass.storage.ssd.raw_device import is_device_path as is_device_path
from windlass.storage.ssd.volume import Volume as Volume
from windlass.storage.ssd.volume import has_volume as has_volume
from windlass.storage.ssd.volume_format import UNIT_NBYTES as UNIT_NBYTES
from windlass.storage.ssd.volume_format import Allocation as Allocation
from windlass.storage.ssd.volume_format import Demand as Demand
