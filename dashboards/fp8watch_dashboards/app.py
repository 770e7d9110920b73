"""The script for `streamlit run`: the list of pages."""

from __future__ import annotations

import streamlit as st

from fp8watch_dashboards.views import run

st.set_page_config(page_title="fp8watch", layout="wide")
st.html("<style>.stMainBlockContainer {padding: 2.5rem 3rem 2rem}</style>")
st.navigation([st.Page(run.page, title="Run", url_path="run", default=True)], position="hidden").run()
