"""`openapi.yaml` is generated from the app."""

from gpubroker_server.gateway.app import openapi_document
from gpubroker_server.http.openapi import openapi_yaml

from tests.architecture.source_tree import ROOT


def test_openapi_yaml_is_the_document_of_the_app() -> None:
    """If this fails: python -m gpubroker_server openapi > openapi.yaml"""
    assert (ROOT / "openapi.yaml").read_text(encoding="utf-8") == openapi_yaml(openapi_document())
