"""Signs certificates for this machine, by openssl, as an operator would."""

import subprocess
from pathlib import Path


class Authority:
    """Signs certificates; makes its files in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self.root = folder / "ca.pem"
        _openssl("req", "-x509", "-subj", "/CN=lab", *_NEW, folder / "ca.key", "-out", self.root)

    def signed(self, name: str) -> tuple[Path, Path]:
        """A certificate for localhost, and its key."""
        key, request, made = (self._folder / f"{name}.{end}" for end in ("key", "csr", "pem"))
        names = self._folder / "names"
        names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n", encoding="ascii")
        _openssl("req", "-subj", f"/CN={name}", *_NEW, key, "-out", request)
        signer = ("-CA", self.root, "-CAkey", self._folder / "ca.key", "-CAcreateserial")
        _openssl("x509", "-req", "-in", request, *signer, "-extfile", names, "-out", made)
        return made, key


_NEW = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout")


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
