pub(crate) async fn document() -> &'static str {
    ""
}
