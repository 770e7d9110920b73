"""The Streamlit console, and the Grafana dashboard and reference pages that are built from the code."""
