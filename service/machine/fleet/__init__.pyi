"""The boxes of a service as all its parts see them: what a box is made of, what is free on it, and what both sides say.

A *box* is a machine with a home, a dispatcher, a database and a Ray of its own. The *head* is the box with the API and
the queue. A box works on the jobs that the head gives it, and reports what becomes of them.
"""

from windlass.service.machine.fleet.content import ContentFile as ContentFile
from windlass.service.machine.fleet.content import ContentPending as ContentPending
from windlass.service.machine.fleet.content import JobContent as JobContent
from windlass.service.machine.fleet.content import ResultFolder as ResultFolder
from windlass.service.machine.fleet.content import Where as Where
from windlass.service.machine.fleet.content import is_model_of as is_model_of
from windlass.service.machine.fleet.content import is_result_of as is_result_of
from windlass.service.machine.fleet.content import model_name as model_name
from windlass.service.machine.fleet.content import place_of as place_of
from windlass.service.machine.fleet.content import result_file_id as result_file_id
from windlass.service.machine.fleet.content import root_of as root_of
from windlass.service.machine.fleet.content import taken_dir as taken_dir
from windlass.service.machine.fleet.content import taken_file as taken_file
from windlass.service.machine.fleet.facts import BoxFacts as BoxFacts
from windlass.service.machine.fleet.facts import Finding as Finding
from windlass.service.machine.fleet.facts import GpuFacts as GpuFacts
from windlass.service.machine.fleet.facts import SsdFacts as SsdFacts
from windlass.service.machine.fleet.facts import resources_of_box as resources_of_box
from windlass.service.machine.fleet.findings import findings_here as findings_here
from windlass.service.machine.fleet.here import FactsHere as FactsHere
from windlass.service.machine.fleet.here import facts_of_this_box as facts_of_this_box
from windlass.service.machine.fleet.hold import Silence as Silence
from windlass.service.machine.fleet.hold import note_answer as note_answer
from windlass.service.machine.fleet.hold import read_hold as read_hold
from windlass.service.machine.fleet.hold import read_silence as read_silence
from windlass.service.machine.fleet.hold import stop_holding as stop_holding
from windlass.service.machine.fleet.hold import write_hold as write_hold
from windlass.service.machine.fleet.link_endpoint import LinkPortError as LinkPortError
from windlass.service.machine.fleet.link_endpoint import forget_link as forget_link
from windlass.service.machine.fleet.link_endpoint import link_certificates as link_certificates
from windlass.service.machine.fleet.link_endpoint import link_files as link_files
from windlass.service.machine.fleet.link_endpoint import link_name as link_name
from windlass.service.machine.fleet.link_endpoint import link_name_of_head as link_name_of_head
from windlass.service.machine.fleet.link_endpoint import reserve_link_port as reserve_link_port
from windlass.service.machine.fleet.link_probe import LinkProbe as LinkProbe
from windlass.service.machine.fleet.messages import MOST_JOBS as MOST_JOBS
from windlass.service.machine.fleet.messages import CapacityReport as CapacityReport
from windlass.service.machine.fleet.messages import InstructionMessage as InstructionMessage
from windlass.service.machine.fleet.messages import PartLink as PartLink
from windlass.service.machine.fleet.messages import PartMove as PartMove
from windlass.service.machine.fleet.messages import PartOrder as PartOrder
from windlass.service.machine.fleet.messages import PartReport as PartReport
from windlass.service.machine.fleet.messages import ProbeAnswer as ProbeAnswer
from windlass.service.machine.fleet.messages import ProbeAsk as ProbeAsk
from windlass.service.machine.fleet.messages import ProbeResult as ProbeResult
from windlass.service.machine.fleet.messages import SsdSpaceReport as SsdSpaceReport
from windlass.service.machine.fleet.messages import SyncReply as SyncReply
from windlass.service.machine.fleet.messages import SyncRequest as SyncRequest
from windlass.service.machine.fleet.reports import JobId as JobId
from windlass.service.machine.fleet.reports import ReportedRow as ReportedRow
from windlass.service.machine.fleet.reports import error_text as error_text
from windlass.service.machine.fleet.reports import is_job_id as is_job_id
from windlass.service.machine.fleet.reports import readable_part as readable_part
from windlass.service.machine.fleet.ssd_ledger import note_written as note_written
from windlass.service.machine.fleet.ssd_ledger import written_by_ssd as written_by_ssd
