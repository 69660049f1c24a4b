"""A half-done task, forked: prepare once, try several ways from there, keep the best."""

from capsule_sdk import Capsule, CapsuleClient

PREPARE = """
import random
random.seed(7)
open("numbers.txt", "w").write(" ".join(str(random.randrange(10**6)) for _ in range(5000)))
"""

WAYS = {
    "selection": "for i in range(len(a)): k = a.index(min(a[i:]), i); a[i], a[k] = a[k], a[i]",
    "insertion": "import bisect; b = []; [bisect.insort(b, x) for x in a]; a = b",
    "builtin": "a.sort()",
}


def attempt(capsule: Capsule, way: str) -> float:
    code = f"a = [int(n) for n in open('numbers.txt').read().split()]\n{way}\nassert a == sorted(a)"
    return capsule.run(code, timeout=60).check().cpu_ms


with CapsuleClient() as client, client.create("python") as capsule:
    capsule.run(PREPARE).check()
    forks = capsule.fork(len(WAYS))
    for (name, way), fork in zip(WAYS.items(), forks, strict=True):
        with fork:
            print(f"{name:10} {attempt(fork, way):8.0f} ms of CPU")
