"""The repositories, which hold all SQL: one module for each kind of row."""

from windlass.storage.sql.repositories.api_keys import KeyRepository as KeyRepository
from windlass.storage.sql.repositories.api_keys import Role as Role
from windlass.storage.sql.repositories.api_keys import digest_of as digest_of
from windlass.storage.sql.repositories.api_keys import is_active as is_active
from windlass.storage.sql.repositories.api_keys import needs_note as needs_note
from windlass.storage.sql.repositories.audit import AuditRepository as AuditRepository
from windlass.storage.sql.repositories.audit import AuditResult as AuditResult
from windlass.storage.sql.repositories.audit import audit_id as audit_id
from windlass.storage.sql.repositories.deletions import DeletionRepository as DeletionRepository
from windlass.storage.sql.repositories.deletions import RemovalKind as RemovalKind
from windlass.storage.sql.repositories.events import EventRepository as EventRepository
from windlass.storage.sql.repositories.files import FileRepository as FileRepository
from windlass.storage.sql.repositories.files import new_file_id as new_file_id
from windlass.storage.sql.repositories.jobs import JobFields as JobFields
from windlass.storage.sql.repositories.jobs import JobRepository as JobRepository
from windlass.storage.sql.repositories.jobs import NewJob as NewJob
from windlass.storage.sql.repositories.journal_import import Outcome as Outcome
from windlass.storage.sql.repositories.journal_import import import_journal as import_journal
from windlass.storage.sql.repositories.leases import Holder as Holder
from windlass.storage.sql.repositories.leases import LeaseRepository as LeaseRepository
from windlass.storage.sql.repositories.retention import RetentionRepository as RetentionRepository
from windlass.storage.sql.repositories.webhooks import EVENT_TYPES as EVENT_TYPES
from windlass.storage.sql.repositories.webhooks import Due as Due
from windlass.storage.sql.repositories.webhooks import WebhookRepository as WebhookRepository
from windlass.storage.sql.repositories.webhooks import event_body as event_body
from windlass.storage.sql.repositories.webhooks import new_event_id as new_event_id
