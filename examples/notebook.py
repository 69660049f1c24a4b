"""A notebook-like session: variables that live on, a table, and a chart if matplotlib is there."""

from pathlib import Path

from capsule_sdk import CapsuleClient

client = CapsuleClient()  # at CAPSULE_URL, or http://localhost:8080

TABLE = """
class Table:
    def __init__(self, rows): self.rows = rows
    def __repr__(self): return f"<{len(self.rows)} rows>"
    def _repr_html_(self):
        cells = ("".join(f"<td>{cell}</td>" for cell in row) for row in self.rows)
        return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"
Table(cities)
"""

CHART = """
import matplotlib.pyplot as plt
plt.bar([name for name, _ in cities], [people for _, people in cities])
plt.title("Millions of people")
"""

with client.create("python") as capsule, capsule.context() as ctx:
    ctx.run("cities = [('Rome', 2.8), ('Oslo', 0.7), ('Lima', 10.1)]")
    print(ctx.run("sum(people for _, people in cities)").text)

    table = ctx.run(TABLE).main
    assert table is not None
    print(table.text, table.html)

    failed = ctx.run("cities['Rome']")
    assert failed.error is not None
    print(f"{failed.error.name}: {failed.error.value}")

    slow = "import time\nfor n in range(3): print('step', n); time.sleep(0.1)"
    ctx.run(slow, on_stdout=lambda text: print(text, end=""))  # as it comes
    print(
        ctx.run("while True: pass", timeout=0.5).status, "and still:", ctx.run("len(cities)").text
    )

    drawn = ctx.run(CHART)
    for figure in drawn.results:
        if figure.png and figure.chart:
            Path("cities.png").write_bytes(figure.png)
            print("cities.png:", figure.chart["type"], figure.chart["series"])
    if drawn.error is not None:
        print("no chart:", drawn.error.value)
