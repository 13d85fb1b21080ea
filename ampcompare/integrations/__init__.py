"""Parts of ampcompare that plug into other tools: `lightning`, and the plugin of pytest.

Each module imports its library, and only that.
"""
