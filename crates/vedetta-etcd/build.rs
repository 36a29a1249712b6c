//! Compiles the messages of the v3 API.

use std::path::PathBuf;
use std::{env, fs};

use protox::prost::Message as _;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files = protox::compile(["rpc.proto"], ["proto"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    // The gateway reads from it how messages look as JSON.
    fs::write(out.join("rpc.bin"), files.encode_to_vec())?;
    tonic_prost_build::configure()
        .build_client(false)
        .bytes(".")
        .codec_path("crate::v3::codec::SmallCodec")
        // Keys and events are written from what the store holds, without a copy of them in between.
        .extern_path(".mvccpb.KeyValue", "crate::v3::wire::KeyValue")
        .extern_path(".etcdserverpb.WatchResponse", "crate::v3::wire::WatchResponse")
        .compile_fds(files.clone())?;
    // For what asks other servers: messages that can be read.
    let source = out.join("source");
    fs::create_dir_all(&source)?;
    let mut asked = files.clone();
    for file in &mut asked.file {
        file.service.retain(|service| ["KV", "Watch", "Lease", "Auth"].contains(&service.name()));
        file.source_code_info = None; // it finds services by their number, which has changed
    }
    tonic_prost_build::configure()
        .build_server(false)
        .build_transport(false)
        .bytes(".")
        .out_dir(source)
        .compile_fds(asked)?;
    // For the tests, whose messages own their bytes.
    let client = out.join("client");
    fs::create_dir_all(&client)?;
    tonic_prost_build::configure().build_server(false).out_dir(client).compile_fds(files)?;
    Ok(())
}
