"""The calls of the API, one module for each kind of object."""

from windlass.service.api.routes import audit as audit
from windlass.service.api.routes import boxes as boxes
from windlass.service.api.routes import events as events
from windlass.service.api.routes import files as files
from windlass.service.api.routes import health as health
from windlass.service.api.routes import jobs as jobs
from windlass.service.api.routes import login as login
from windlass.service.api.routes import metrics as metrics
from windlass.service.api.routes import models as models
from windlass.service.api.routes import plans as plans
from windlass.service.api.routes import storage as storage
from windlass.service.api.routes import webhooks as webhooks
from windlass.service.api.routes.dashboard import install_dashboard as install_dashboard
from windlass.service.api.routes.metrics import JobCollector as JobCollector
from windlass.service.api.routes.metrics import RequestMetrics as RequestMetrics
from windlass.service.api.routes.metrics import RequestMetricsMiddleware as RequestMetricsMiddleware
