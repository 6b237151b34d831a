"""The calls about the boxes of a service, and what they show of each box."""

from windlass.service.api.routes.boxes.calls import router as router
from windlass.service.api.routes.boxes.gauges import metrics_of_boxes as metrics_of_boxes
from windlass.service.api.routes.boxes.overview import BoxView as BoxView
from windlass.service.api.routes.boxes.overview import view_boxes as view_boxes
