"""Every exception the platform raises on purpose.

    RaytrainError
    ├── SpecError                     the spec is wrong: every wrong field, its value, what is allowed
    ├── TaskError                     the task breaks its contract, or its code raised
    │   ├── DataError                 a data set raised at one index
    │   └── NonFiniteLossError        the loss became NaN or infinite
    ├── JobError                      the job as a whole cannot go on
    │   ├── JobAlreadyRunningError    a job of the same name is running on this cluster
    │   ├── InfeasibleRequestError    no node can ever offer what one worker asks for
    │   └── JobFailedError            the job stopped; carries the user's own traceback
    ├── CheckpointError               nothing usable where state was expected, or state that does not fit
    └── GroupBrokenError              a collective failed; the step did not happen (never reaches the user)

Each takes one message, so each survives pickling between processes unchanged.
"""


class RaytrainError(Exception):
    """Base of every exception the platform raises on purpose."""


class SpecError(RaytrainError):
    """The spec is wrong; the message names every wrong field, its value and what is allowed."""


class TaskError(RaytrainError):
    """The task breaks its contract, or its code raised."""


class DataError(TaskError):
    """A data set raised at one index; the message names the index, the step and the shard."""


class NonFiniteLossError(TaskError):
    """The loss became NaN or infinite and the spec says to stop."""


class JobError(RaytrainError):
    """The job as a whole cannot go on."""


class JobAlreadyRunningError(JobError):
    """A job of the same name is running on this cluster."""


class InfeasibleRequestError(JobError):
    """No node of the cluster can ever offer what one worker asks for."""


class JobFailedError(JobError):
    """The job stopped for good; the message ends with the traceback of what stopped it."""


class CheckpointError(RaytrainError):
    """Nothing usable was found where state was expected, or the state does not fit the task."""


class GroupBrokenError(RaytrainError):
    """A collective failed: the step did not happen here, and a new generation must be agreed."""
