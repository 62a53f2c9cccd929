"""The ``raytrain`` command."""
