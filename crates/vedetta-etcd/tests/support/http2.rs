//! HTTP/2 by hand: frames as they are on the wire, also such that no client would send.

/// A frame of HTTP/2.
pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// How every connection of HTTP/2 begins, with settings of no change.
pub(crate) fn preface() -> Vec<u8> {
    [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), frame(4, 0, 0, b"")].concat()
}

/// Headers as literals that nobody needs to remember.
pub(crate) fn hpack(fields: &[(&str, &str)]) -> Vec<u8> {
    let text = |text: &str| {
        assert!(text.len() < 127);
        [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat()
    };
    fields.iter().flat_map(|(name, value)| [vec![0], text(name), text(value)].concat()).collect()
}

/// A call on a stream, with a message as it is framed in gRPC.
pub(crate) fn grpc_call(stream: u32, path: &str, message: &[u8]) -> Vec<u8> {
    let path = format!("/etcdserverpb.{path}");
    let fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", &path),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ];
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    let framed = [&[0], &length[..], message].concat();
    [frame(1, 4, stream, &hpack(&fields)), frame(0, 1, stream, &framed)].concat()
}
