"""LeRobot's async server, with chunks that continue the last one.

    dpa run -m dpa.acceleration.lerobot_server --host=127.0.0.1 --port=8080

takes the arguments of ``lerobot.async_inference.policy_server`` and serves the same client. The
timestep of an observation is the number of the last action that the robot executed, and the
place of the chunk that answers it. So the server knows what is left of the chunk before. How many
actions are executed until a chunk is there, the last chunks' times say: from an observation's
arrival to the client's next call, which follows as soon as it has the chunk.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from time import perf_counter
from typing import Any

from lerobot.async_inference import policy_server
from torch import Tensor

from dpa.acceleration.construction import accelerate_new_by_environment
from dpa.acceleration.real_time import ChunkInTime
from dpa.tracking.replacing import replaced

_CHUNKS = 8  # the next one is expected to take as long as the longest of so many


class ContinuingServer(policy_server.PolicyServer):
    """Holds a chunk to the rest of the last one, where its policy is LeRobot's and accelerated."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._forget()

    def _forget(self) -> None:
        self._episode = object()  # a chunk that is made for another one is forgotten
        self._continued = False  # whether a chunk was: the first one takes a capture
        self._chunk: Tensor | None = None  # the last one, as it was sent, normalised
        self._first = 0  # the timestep of its first action
        self._arrived: float | None = None  # its observation, where the client has yet to call
        self._took: deque[float] = deque(maxlen=_CHUNKS)  # seconds

    def _reset_server(self) -> None:
        super()._reset_server()
        self._forget()

    def SendPolicyInstructions(self, request: Any, context: Any) -> Any:
        """Load a policy, which continues no other's chunk."""
        self._forget()
        return super().SendPolicyInstructions(request, context)

    def _enqueue_observation(self, obs: Any) -> bool:
        obs.arrived = perf_counter()
        return super()._enqueue_observation(obs)

    def GetActions(self, request: Any, context: Any) -> Any:
        """Answer the newest observation with a chunk."""
        if self._arrived is not None:
            self._took.append(perf_counter() - self._arrived)
            self._arrived = None
        return super().GetActions(request, context)

    def _get_action_chunk(self, observation: dict[str, Tensor]) -> Tensor:
        if not isinstance(replaced(self.policy, ChunkInTime.METHOD), ChunkInTime):
            return super()._get_action_chunk(observation)
        episode, last, observed = self._episode, self._chunk, self.last_processed_obs
        step, left = observed.get_timestep(), None
        if self._continued:
            self._arrived = observed.arrived  # the robot acts while this chunk is made
        if last is not None:
            executed = step - self._first
            left = last[:, executed:] if 0 <= executed < last.shape[1] else None
        # The chunk's first action is at the timestep itself, and executed.
        delay = 1 + math.ceil(max(self._took, default=0.0) / self.config.environment_dt)
        chunk = self.policy.predict_action_chunk(
            observation, inference_delay=delay, prev_chunk_left_over=left
        )
        sent = chunk[:, : self.actions_per_chunk]
        if episode is self._episode:
            self._chunk, self._first = sent, step
            self._continued = self._continued or left is not None
        return sent


def serve() -> None:
    """Serve policies, by the command line's arguments."""
    accelerate_new_by_environment(lambda line: print(line, file=sys.stderr))
    policy_server.PolicyServer = ContinuingServer
    policy_server.serve()


if __name__ == "__main__":
    serve()
