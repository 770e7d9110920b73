"""What people look at: the Streamlit console and the Grafana dashboards, built from the metric catalogue."""
