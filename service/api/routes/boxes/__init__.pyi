"""The calls about the boxes of a service, what they show of each, and the machines that plans know by name."""

from windlass.service.api.routes.boxes.calls import router as router
from windlass.service.api.routes.boxes.gauges import metrics_of_boxes as metrics_of_boxes
from windlass.service.api.routes.boxes.machines import machines_router as machines_router
from windlass.service.api.routes.boxes.overview import BoxView as BoxView
from windlass.service.api.routes.boxes.overview import view_boxes as view_boxes
