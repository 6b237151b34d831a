"""Delivers signed webhooks."""

from windlass.service.webhooks.delivery import DeliveryError as DeliveryError
from windlass.service.webhooks.delivery import UrlRefusedError as UrlRefusedError
from windlass.service.webhooks.delivery import check_url as check_url
from windlass.service.webhooks.delivery import new_signing_secret as new_signing_secret
from windlass.service.webhooks.delivery import send as send
from windlass.service.webhooks.secret_box import SealError as SealError
from windlass.service.webhooks.secret_box import SecretBox as SecretBox
from windlass.service.webhooks.sender import WebhookSender as WebhookSender
