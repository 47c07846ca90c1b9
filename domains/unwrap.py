"""`unwrap`: a note lies under three layers of encoding; take them off, one tool a turn, in three turns.

The workspace holds `layer.0`. The first line of a layer says in two words how the rest is encoded, the rest is the next
layer: so each right move reveals what the next one has to be. Moves are shell commands on the files of a bubblewrap
sandbox (one long-running `sh` a trajectory); the wrong tool fails and costs a turn. A policy that chooses at random
takes off 3/8 of a layer: reward 0.125.

The verifier restores the workspace into a second, clean sandbox and digests the layers there; the score is the share
of the three layers that are there byte for byte. A layer out of reach of the last move counts as missing, so partial
work earns partial reward.

Every ordered choice of three of the eight encodings is in exactly one split, so held-out tasks are combinations that
were never trained on.
"""

import base64
import hashlib
import itertools
import random
import zlib
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from models.tokenizer import Vocabulary
from sandbox.port import Process, Sandbox, SandboxError
from schemas.events import Action, Observation, Split
from schemas.records import Command, ExecutionResult, Limits, StepResult, Task, Trajectory, Verdict, Workspace
from verify.port import Runtime

NUM_LAYERS = 3
NUM_EVAL, NUM_PROBE = 64, 64
PLAIN = "plain text"
_PAD = b"-" * 15 + b"\n"
_LETTERS = bytes(range(65, 91)) + bytes(range(97, 123))
_SHIFTED = bytes.maketrans(_LETTERS, _LETTERS[13:26] + _LETTERS[:13] + _LETTERS[39:] + _LETTERS[26:39])
_SWAPPED = bytes.maketrans(_LETTERS, _LETTERS[26:] + _LETTERS[:26])


def _stored_gzip(data: bytes) -> bytes:
    """A gzip member with one stored block: the same bytes whatever the zlib, since verdicts compare digests."""
    assert len(data) < 1 << 16, "a stored block holds 64 KiB"
    size = len(data).to_bytes(2, "little")
    complement = (len(data) ^ 0xFFFF).to_bytes(2, "little")
    trailer = zlib.crc32(data).to_bytes(4, "little") + len(data).to_bytes(4, "little")
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + b"\x01" + size + complement + data + trailer


class Tool(Struct, frozen=True, kw_only=True):
    """A move of the policy and the encoding that it undoes."""

    name: str
    kind: str
    """First line of a layer that it can take off."""
    command: str
    """Filter that takes the layer off: standard input → standard output."""
    wrap: Callable[[bytes], bytes]
    """Puts such a layer on."""


TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool(name="base64", kind="radix 64", command="base64 -d", wrap=base64.encodebytes),
        Tool(name="base32", kind="radix 32", command="base32 -d", wrap=base64.b32encode),
        Tool(name="base16", kind="radix 16", command="basenc --base16 -d", wrap=base64.b16encode),
        Tool(name="gunzip", kind="deflate stream", command="gzip -dc", wrap=_stored_gzip),
        Tool(
            name="rot13",
            kind="letters shifted",
            command="tr A-Za-z N-ZA-Mn-za-m",
            wrap=lambda data: data.translate(_SHIFTED),
        ),
        Tool(
            name="swapcase",
            kind="letters swapped",
            command="tr A-Za-z a-zA-Z",
            wrap=lambda data: data.translate(_SWAPPED),
        ),
        Tool(name="behead", kind="padding before", command="tail -c +17", wrap=lambda data: _PAD + data),
        Tool(name="curtail", kind="padding after", command="head -c -16", wrap=lambda data: data + _PAD),
    )
}

VOCABULARY = Vocabulary(
    outputs=tuple(TOOLS),
    inputs=tuple(
        dict.fromkeys(
            f"layer 0 1 2 3 : done failed not {PLAIN} {' '.join(tool.kind for tool in TOOLS.values())}".split()
        )
    ),
)
"""What a policy says and reads here; see `models.tokenizer`."""

_MARKER = b"\x04\n"
_PRELUDE = b"""export LC_ALL=C; n=0
look() { IFS= read -r kind <layer.$n; printf 'layer %s: %s\\n\\004\\n' "$n" "$kind"; }
peel() {
  wanted=$1; shift
  if [ "$kind" != "$wanted" ]; then printf 'failed: not %s\\n' "$wanted"
  elif { IFS= read -r kind; "$@"; } <layer.$n >layer.$((n+1)); then n=$((n+1)); echo done
  else echo failed; fi
  look
}
look
"""
_LIMITS = Limits(wall_seconds=60, cpu_seconds=10, processes=16, disk_bytes=4 * 1024 * 1024)
_STEP_SECONDS = 10.0
_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "islet", "jetty", "knoll", "larch")


def layers(task: Task) -> list[bytes]:
    """Content of `layer.0` to `layer.3`: what the workspace holds when all is unwrapped."""
    contents = [f"{PLAIN}\n{task.data['note']}\n".encode()]
    for name in reversed(task.data["tools"]):
        contents.insert(0, TOOLS[name].kind.encode() + b"\n" + TOOLS[name].wrap(contents[0]))
    return contents


def _tasks() -> list[Task]:
    """All 512 tasks in a fixed random order, the first held out for evaluation, the next for probes."""
    source = random.Random("unwrap")  # noqa: S311 - reproducible, not secret
    stacks = list(itertools.product(TOOLS, repeat=NUM_LAYERS))
    source.shuffle(stacks)
    return [
        Task(
            key="unwrap/" + "-".join(stack),
            domain=Unwrap.name,
            split=_split(position),
            prompt="Take three layers of encoding off the note, one tool a turn.",
            data={"tools": list(stack), "note": " ".join(source.choices(_WORDS, k=6))},
        )
        for position, stack in enumerate(stacks)
    ]


def _split(position: int) -> Split:
    if position < NUM_EVAL:
        return "eval"
    return "probe" if position < NUM_EVAL + NUM_PROBE else "train"


class Unwrap:
    """The domain."""

    name = "unwrap"
    vocabulary = VOCABULARY
    max_turns = NUM_LAYERS

    def __init__(self) -> None:
        self._by_key = {task.key: task for task in _tasks()}

    def tasks(self, split: Split) -> Sequence[Task]:
        """Tasks of a split, in a fixed order."""
        return [task for task in self._by_key.values() if task.split == split]

    def task(self, key: str) -> Task:
        """One task; KeyError for an unknown key."""
        return self._by_key[key]

    def environment(self) -> "UnwrapEnvironment":
        """A new environment."""
        return UnwrapEnvironment()

    def verifier(self) -> "UnwrapVerifier":
        """The primary scorer."""
        return UnwrapVerifier()

    def tool_definitions(self) -> list[dict[str, object]]:
        """The tools on offer, as function definitions without parameters."""
        return [
            {"type": "function", "function": {"name": tool.name, "description": f"Run `{tool.command}` on the layer."}}
            for tool in TOOLS.values()
        ]

    def reference_actions(self, task: Task) -> list[Action]:
        """Moves that reach reward 1."""
        return [Action(action_id=f"a{turn}", name=name) for turn, name in enumerate(task.data["tools"])]


class UnwrapEnvironment:
    """One trajectory: a sandbox with one shell in it. Blocking; one thread at a time."""

    version = "1"

    def __init__(self) -> None:
        self._sandbox: Sandbox | None = None
        self._shell: Process | None = None
        self._turns = 0

    @property
    def image_digest(self) -> str | None:
        """What the sandbox ran; null before `reset`."""
        return self._sandbox.image_digest if self._sandbox else None

    def reset(self, task: Task, runtime: Runtime) -> Observation:
        """Write the wrapped note into a fresh sandbox and look at it.

        Raises:
            SandboxError: no sandbox, or it broke: an infrastructure failure.
        """
        self.close()
        self._turns = 0
        self._sandbox = runtime.sandbox()
        self._sandbox.write({"layer.0": layers(task)[0]})
        self._shell = self._sandbox.start(Command(argv=("sh",), limits=_LIMITS))
        return Observation(content=self._send(_PRELUDE))

    def step(self, action: Action) -> StepResult:
        """Run one tool's command; an unknown tool fails like a wrong one.

        Raises:
            SandboxError: the sandbox broke: an infrastructure failure.
        """
        self._turns += 1
        tool = TOOLS.get(action.name)
        command = f"peel '{tool.kind}' {tool.command}" if tool else "echo failed: no such tool; look"
        content = self._send(command.encode() + b"\n")
        failed, solved = content.startswith("failed"), content.endswith(f": {PLAIN}")
        return StepResult(
            observation=Observation(action_id=action.action_id, content=content, exit_code=int(failed)),
            reward=None,  # the verifier decides
            terminated=solved,
            truncated=self._turns >= NUM_LAYERS and not solved,
        )

    def workspace(self) -> Workspace | None:
        """Snapshot of the layers."""
        assert self._sandbox is not None, "reset comes first"
        return self._sandbox.snapshot()

    def close(self) -> None:
        """Free the sandbox; idempotent."""
        if self._shell is not None:
            self._shell.close()
        if self._sandbox is not None:
            self._sandbox.close()
        self._shell = self._sandbox = None

    def _send(self, script: bytes) -> str:
        assert self._shell is not None, "reset comes first"
        self._shell.write(script)
        output, complete = self._shell.read_until(_MARKER, _STEP_SECONDS)
        if not complete:
            ended = self._shell.wait(0) if self._shell.poll() is not None else None
            why = f"ended: {ended.error or ended.outcome}" if ended else f"gave no answer within {_STEP_SECONDS:g} s"
            raise SandboxError(f"the shell {why}; it said {output[-200:]!r}")
        return output.removesuffix(_MARKER).decode("utf-8", "replace").strip()


class UnwrapVerifier:
    """Digests the layers of the workspace in a sandbox of its own and compares with the task's."""

    id = Unwrap.name
    version = "1"

    def verify(self, task: Task, trajectory: Trajectory, runtime: Runtime) -> Verdict:
        """Share of layers taken off. `infra_error` where no sandbox runs or the workspace can't be had."""
        expected = {f"layer.{n}": hashlib.sha256(data).hexdigest() for n, data in enumerate(layers(task)) if n > 0}
        base = Verdict(
            outcome="fail",
            score=0.0,
            expected_tests=tuple(expected),
            seen_tests=(),
            passed_tests=(),
            tests_sha256=hashlib.sha256(msgspec.json.encode(expected)).hexdigest(),
        )
        ref = trajectory.finished.workspace_ref
        if ref is None:
            return replace(base, reason="there is no workspace")
        try:
            workspace = runtime.workspace(ref)
            with runtime.sandbox() as sandbox:
                sandbox.restore(workspace)
                result = sandbox.execute(Command(argv=("sha256sum", "--", *expected), limits=_LIMITS))
                return _judge(expected, result, replace(base, sandbox_image_digest=sandbox.image_digest))
        except (SandboxError, LookupError) as error:
            return _infra_error(base, str(error))


def _judge(expected: dict[str, str], result: ExecutionResult, base: Verdict) -> Verdict:
    """Verdict from the output of `sha256sum`, which exits 1 where a file is missing."""
    if result.outcome in ("timeout", "oom"):
        return replace(base, outcome=result.outcome, reason=result.error)
    if result.outcome not in ("ok", "non_zero"):
        return _infra_error(base, result.error or result.outcome)
    lines = result.stdout.decode("utf-8", "replace").splitlines()
    found = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    passed = tuple(name for name, digest in expected.items() if found.get(name) == digest)
    return replace(
        base,
        outcome="pass" if len(passed) == len(expected) else "fail",
        score=len(passed) / len(expected),
        seen_tests=tuple(name for name in expected if name in found),
        passed_tests=passed,
    )


def _infra_error(base: Verdict, reason: str) -> Verdict:
    return replace(base, outcome="infra_error", score=None, seen_tests=None, passed_tests=None, reason=reason)
