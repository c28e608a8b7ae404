"""Notebook applications that run, and Chromium that opens a notebook in them.

JupyterLab and Notebook 7 set the look of outputs in their scripts, so only running ones show it.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook, new_output
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
APPLICATIONS = {"JupyterLab": "doc/tree", "Notebook 7": "notebooks"}
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
LAYOUT = (Path(__file__).parent / "layout.js").read_text()
START_SECONDS = 60


class Server:
    """A Jupyter server with both applications on one notebook, whose outputs are not trusted, as
    after `git clone`.

    Arguments:
      folder: an empty one, for its notebook and settings.
      outputs: the HTML of each cell's output.
    """

    def __init__(self, folder: Path, outputs: list[str]) -> None:
        self._settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
        self._settings.mkdir(parents=True)
        (self._settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false"}')
        (folder / "data").mkdir()
        root = folder / "root"
        root.mkdir()
        nbformat.write(_notebook(outputs), root / "reports.ipynb")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._log = (folder / "log").open("w")
        command = (
            f"-m jupyterlab --no-browser --port={self._port} --ServerApp.root_dir={root}"
            " --ServerApp.port_retries=0 --IdentityProvider.token= --ServerApp.allow_root=True"
            " --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"
        )
        self._process = subprocess.Popen(
            [sys.executable, *command.split()],
            env=os.environ
            | {
                "JUPYTER_CONFIG_DIR": str(folder / "config"),
                "JUPYTER_DATA_DIR": str(folder / "data"),
                "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
                "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
                "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
                "JUPYTER_PLATFORM_DIRS": "1",
            },
            cwd=folder,
            stdout=self._log,
            stderr=self._log,
        )

    def wait(self) -> None:
        """Waits until the server answers."""
        end = time.monotonic() + START_SECONDS
        while self._process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(urllib.error.URLError):
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api"):
                    return
            time.sleep(0.1)
        raise RuntimeError(f"no Jupyter server: {Path(self._log.name).read_text()[-2000:]}")

    def use(self, theme: str) -> None:
        """Sets the theme of the pages that are opened next."""
        (self._settings / "themes.jupyterlab-settings").write_text(
            json.dumps({"theme": THEMES[theme]})
        )

    def address(self, application: str) -> str:
        """The address of the notebook in an application."""
        return f"http://127.0.0.1:{self._port}/{APPLICATIONS[application]}/reports.ipynb"

    def stop(self) -> None:
        """Ends the process."""
        self._process.terminate()
        self._process.wait(timeout=20)
        self._log.close()


def _notebook(outputs: list[str]) -> nbformat.NotebookNode:
    cells = [
        new_code_cell(
            f"report_{number}",
            execution_count=number,
            outputs=[
                new_output(
                    "execute_result",
                    {"text/html": html, "text/plain": "a report"},
                    execution_count=number,
                )
            ],
        )
        for number, html in enumerate(outputs, 1)
    ]
    return new_notebook(cells=cells, metadata={"language_info": {"name": "python"}})


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """The machine's Chromium without a window."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser: Browser, server: Server, count: int) -> dict[str, Page]:
    """For each application a page with the notebook, once its `count` outputs stand there."""
    pages = {
        name: browser.new_page(viewport={"width": 1200, "height": 900}) for name in APPLICATIONS
    }
    for name, page in pages.items():
        page.goto(server.address(name), wait_until="commit")
    for page in pages.values():
        page.wait_for_function(
            f"document.querySelectorAll('.jp-OutputArea-output .sbp').length >= {count}",
            timeout=60_000,
        )
        open_folds(page)
    return pages


def open_folds(page: Page) -> None:
    """Opens all that is folded in reports."""
    page.evaluate("document.querySelectorAll('.sbp details').forEach(d => d.open = true)")


def sized(page: Page, width: int) -> None:
    """Makes the page so wide, and waits until it is laid out."""
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate("() => new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")


def faults(page: Page) -> list[str]:
    """What is wrong in the layout of the page's reports, in words."""
    found: list[str] = page.evaluate(LAYOUT)
    return found
