"""Every path of a run, relative to its root. No other module spells out paths.

run.json                                the first attempt: config, versions; written once
attempts/<n>.json                       each later attempt, with its config
attempts/<n>.ended                      how that attempt ended
attempts/<n>.promotion                  decision of the promotion gate at its end, with the reason
attempts/<n>.early_stop                 why its training ended before training.max_steps, if evaluations ended it
summary.json                            the state of the run when an attempt ended normally
start/                                  the model at policy version 0, a Hugging Face folder
start.json                              which files that folder has, with their checksums; written last
start_hashes.json                       SHA-256 of the start model's files, wherever they are
streams/trajectories/<g>/{seg,log}/     one writer per generator
streams/unfinished/<g>/{seg,log}/       a drained generator's unfinished responses, for its successor
streams/scores/<reward>/<g>/<s>-of-<S>/ scores, aligned with the trajectories of generator g
streams/teachers/<name>/<g>/<t>-of-<T>/ a teacher's log-probabilities, aligned with them too
streams/metrics/<stage>-<r>/            one writer per stage replica
streams/consumed/                       the trainer's: the outcome of each trajectory it took
streams/trainer_logprobs/               the trainer's: log-probability and entropy of each trained token
  …/head.json                           next to any log: a hint at its head
  …/removed.json                        next to a stream's log: how many of its first parts were removed
checkpoints/{data,log}/                 the trainer's, cursors inside the record
weights/{data,log}/                     policy versions in transit, if the store is the transport
weights/promoted/{data,log}/            checkpoints that passed the promotion gate, as Hugging Face folders
progress/<stage>-<r>.json               status records, overwritten
decisions/<n>.json                      the trainer's decisions about staleness and rollbacks; written once
prompt_blocks/<block>.json              source and prompt of each group, where weights or rewards decide; written once
incidents/<ms>-<kind>-<id>.json         restarts, rollbacks and alarms, for people; written once
evaluations/<version>.json              results of one policy version, on held-out prompts and further sets
answers/<version>.parquet               its answers to their prompts, written first: the results name its checksum
note.txt                                a person's note on the run, one line; overwritten
reports/<attempt>.md                    report on an attempt, for people: text and figures
logs/<stage>-<r>.log                    output of each stage process
quarantine/…                            damaged files that fsck moved aside, each under its old path
parquet/                                the run as compact wrote it, for analysis
replay.json                             a replay's request: its stored runs and options
replay/…                                its results: verdict.json, rescored.json, comparison.parquet, report.md
profile.json                            which steps the stages record, if `millrace profile` started the run
profile/<stage>-<r>.json.gz             what one process did meanwhile; trace.json.gz: all processes in one file
"""

import re
import uuid

from storage.errors import BadName

RUN = "run.json"
SUMMARY = "summary.json"
START_MODEL = "start"
START_MANIFEST = "start.json"
START_HASHES = "start_hashes.json"
CHECKPOINTS = "checkpoints"
WEIGHTS = "weights"
PROMOTED = "weights/promoted"
TRAJECTORIES = "streams/trajectories"
CONSUMED = "streams/consumed"
TRAINER_LOGPROBS = "streams/trainer_logprobs"
PROGRESS = "progress"
PROMPT_BLOCKS = "prompt_blocks"
DECISIONS = "decisions"
INCIDENTS = "incidents"
EVALUATIONS = "evaluations"
ANSWERS = "answers"
NOTE = "note.txt"
REPORTS = "reports"
LOGS = "logs"
ATTEMPTS = "attempts"
QUARANTINE = "quarantine"
PARQUET = "parquet"
REPLAY = "replay.json"
REPLAY_RESULTS = "replay"
PROFILE_REQUEST = "profile.json"
PROFILE = "profile"
PROBE = ".probe"
HEAD = "head.json"
REMOVED = "removed.json"

FILE_LOGS = (CHECKPOINTS, WEIGHTS, PROMOTED)
"""The logs whose records name files: what `storage.checkpoints` writes."""

_RECORD = re.compile(r"(?:^|/)log/(\d{12,})\.json$")
_RUN_ID = re.compile(r"[A-Za-z0-9-][A-Za-z0-9._-]{0,127}")


def validate_run_id(run_id: str) -> str:
    """`run_id` unchanged if it can name a run's folder on every store. Raises BadName."""
    if not _RUN_ID.fullmatch(run_id):
        shown = repr(run_id) if len(run_id) <= 128 else f"{run_id[:32]!r}… ({len(run_id)} characters)"
        expected = "1 to 128 characters of A-Z a-z 0-9 . _ -, the first not being '.' or '_'"
        raise BadName("not allowed", file=f"run id {shown}", expected=expected)
    return run_id


def trajectories(generator: int) -> str:
    return f"{TRAJECTORIES}/{generator}"


def unfinished(generator: int) -> str:
    return f"streams/unfinished/{generator}"


def annotations(pool: str, generator: int, annotator: int, num_annotators: int) -> str:
    """The stream in which annotator `annotator` of a pool of `num_annotators` annotates its share of a generator's
    trajectories.

    The pool of most sources' scorers has the name of the run's own `scoring.reward`, whatever rewards they have. So a
    run keeps its scores when sources are added.
    """
    return f"streams/{pool}/{generator}/{annotator}-of-{num_annotators}"


def annotations_of_part(pool: str, generator: int, part: int, num_annotators: int) -> str:
    """The stream with a pool's annotations of a trajectory part."""
    return annotations(pool, generator, annotator_of_part(part, num_annotators), num_annotators)


def annotator_of_part(part: int, num_annotators: int) -> int:
    """Which annotator of a pool has a trajectory part. They take turns, so they need not talk."""
    return part % num_annotators


def annotated_part(annotator: int, ordinal: int, num_annotators: int) -> int:
    """The trajectory part that part number `ordinal` of an annotator's stream annotates."""
    return ordinal * num_annotators + annotator


def num_annotated_parts(annotator: int, end: int, num_annotators: int) -> int:
    """How many of the trajectory parts before part `end` are this annotator's."""
    return len(range(annotator, end, num_annotators))


def metrics(stage: str, replica: int) -> str:
    return f"streams/metrics/{stage}-{replica}"


def merged_metrics(stage: str, replica: int) -> str:
    return f"streams/merged_metrics/{stage}-{replica}"


def attempt(number: int) -> str:
    return f"{ATTEMPTS}/{number:04d}.json"


def ended(number: int) -> str:
    return f"{ATTEMPTS}/{number:04d}.ended"


def promotion(attempt: int) -> str:
    return f"{ATTEMPTS}/{attempt:04d}.promotion"


def early_stop(attempt: int) -> str:
    return f"{ATTEMPTS}/{attempt:04d}.early_stop"


def report(attempt: int) -> str:
    return f"{REPORTS}/{attempt:04d}.md"


def progress(stage: str, replica: int) -> str:
    return f"{PROGRESS}/{stage}-{replica}.json"


def decision(number: int) -> str:
    return f"{DECISIONS}/{number:08d}.json"


def prompt_block(number: int) -> str:
    return f"{PROMPT_BLOCKS}/{number:08d}.json"


def evaluation(policy_version: int) -> str:
    return f"{EVALUATIONS}/{policy_version:08d}.json"


def answers(policy_version: int) -> str:
    return f"{ANSWERS}/{policy_version:08d}.parquet"


def log_file(stage: str, replica: int) -> str:
    return f"{LOGS}/{stage}-{replica}.log"


def profile_trace(name: str) -> str:
    """The trace `name`: that of a process such as `train-0`, or `trace`, which holds all of them."""
    return f"{PROFILE}/{name}.json.gz"


def record(seq: int) -> str:
    """The commit record number `seq`, relative to its log's folder."""
    return f"log/{seq:012d}.json"


def record_seq(path: str) -> int | None:
    """The number of the commit record at `path`; None if `path` is something else."""
    match = _RECORD.search(path)
    return int(match[1]) if match else None


def new_part(epoch: int) -> str:
    """A fresh path for a part's file, relative to its stream's folder. A part is never overwritten."""
    return f"seg/{epoch}-{uuid.uuid4().hex}.arrows"


def new_checkpoint_data(step: int) -> str:
    """A fresh folder for one checkpoint's files, relative to the checkpoints' folder."""
    return f"data/{step:08d}-{uuid.uuid4().hex}"
