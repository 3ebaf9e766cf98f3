"""Builders of the native libraries; installed as zipscape.op_builder. Import-light: nothing is probed or built here."""
