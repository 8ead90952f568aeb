"""An audit in a process of its own, because damaged bytes can end the process that reads them.

Lance trusts the lengths in its files: damage in one can make it allocate gigabytes, and end the process when that
fails. So the audit runs in a child process, limited to the free memory, and announces each step on its output before
taking it. When it dies, that step becomes a finding, and the audit is repeated without the step.
"""

import json
import resource
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from mopd_dataplane.errors import ResourceError
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.maintain.verify_report import Finding, VerifyReport, watch

DEATHS = 64
"""Number of steps that may end the process before the audit gives up."""
_LEAST = 1 << 30
_SECONDS = 7 * 24 * 3600

Step = tuple[str, str, int]
"""Table, step of its audit, first row of the step."""


def verify_apart(store: Store, *, deep: bool = True) -> VerifyReport:
    """Audit a store as Store.verify does; bytes that end the process that reads them become findings too.

    Raises ResourceError when the audit is ended again and again.
    """
    deadly: dict[Step, str] = {}
    for _ in range(DEATHS):
        report, step, how = _attempt(store, deep, deadly)
        if report is not None:
            return report
        if step is None or step in deadly:
            raise ResourceError(f"{store.uri}: the audit {how} before it read anything of the store; run it again")
        deadly[step] = f"reading them {how}: a damaged length in their file asks for more memory than there is"
    raise ResourceError(
        f"{store.uri}: {DEATHS} steps of the audit ended its process, the first of {next(iter(deadly))}"
    )


def _attempt(store: Store, deep: bool, deadly: dict[Step, str]) -> tuple[VerifyReport | None, Step | None, str]:
    """Run the audit once. Returns the report or None, the last step, and how the process ended if there is no
    report."""
    request = {
        "uri": store.uri, "options": store.location.storage_options, "deep": deep,
        "deadly": [[*step, why] for step, why in deadly.items()],
    }  # fmt: skip
    command = [sys.executable, "-m", "mopd_dataplane.store.maintain.verify_apart"]
    last: Step | None = None
    with (
        tempfile.TemporaryFile("w+") as told,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=told, text=True) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(request))
            child.stdin.close()
            for line in child.stdout:
                said = json.loads(line)
                if "report" in said:
                    findings = [Finding(**finding) for finding in said["report"].pop("findings")]
                    return VerifyReport(findings, **said["report"]), last, ""
                last = (said["at"][0], said["at"][1], said["at"][2])
            code = child.wait(_SECONDS)
        finally:
            child.kill()
        told.seek(0)
        words = told.read().strip().splitlines()
    ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return None, last, f"ended the process ({ended}{': ' + words[-1][:160] if words else ''})"


def main() -> None:
    """Audit the store that the input names; print steps, then the report."""
    request = json.load(sys.stdin)
    deadly: dict[Step, str] = {(table, step, row): why for table, step, row, why in request["deadly"]}
    store = Store.open(request["uri"], request["options"] or None)

    def announce(table: str, step: str, row: int) -> str:
        print(json.dumps({"at": [table, step, row]}), flush=True)
        return deadly.get((table, step, row), "")

    watch(announce)
    _limit_memory()
    print(json.dumps({"report": asdict(store.verify(deep=request["deep"]))}), flush=True)


def _limit_memory() -> None:
    """Limit memory to what is free now: a larger request fails here, instead of ending a process that the system
    chooses."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) << 10
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit, highest = used + max(free, _LEAST), resource.getrlimit(resource.RLIMIT_AS)[1]
    if highest != resource.RLIM_INFINITY:
        limit = min(limit, highest)
    resource.setrlimit(resource.RLIMIT_AS, (limit, highest))


if __name__ == "__main__":
    main()
